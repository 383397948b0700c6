"""A web page that shows one running pipeline, live: ``headgate run --ui PORT``.

``view_model`` keeps what the page shows; ``app`` checks access, answers requests, and has the port and the thread.
``page/`` holds everything that browsers load. ``cli.output`` feeds the page.
"""
