"""Shows graphs, streams and progress as text, HTML and SVG, in terminals and notebooks.

Imports ``model`` and nothing else. Escapes all names that users choose. Never runs, writes or requests anything.
"""
