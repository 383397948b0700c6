"""What people look at: graphs, streams and progress as text, HTML and SVG, and how notebooks show them.

Above ``model`` and nothing else. Whatever users name is escaped here; nothing is run, written or asked for.
"""
