"""tailreplay-train: trains the bundled model. Not part of the installed package; see training/README.md."""
