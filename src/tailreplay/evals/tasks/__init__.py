"""Task generators: seeds and a length in, documents with questions out."""
