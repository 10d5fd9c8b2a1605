"""Task generators: texts with questions whose answers need memory of one kind or another."""
