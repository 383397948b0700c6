"""Objects by path, with create-if-absent: local files, memory, and object stores. No stream store in it."""
