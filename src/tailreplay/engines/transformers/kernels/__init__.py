"""Faster CPU code for parts of the library's mixers. One file a kernel; `install` puts them into a model."""
