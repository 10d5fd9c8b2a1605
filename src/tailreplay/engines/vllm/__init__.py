"""The vLLM engine: a plugin that taps the model and a KV connector that reuses prefixes to the token."""
