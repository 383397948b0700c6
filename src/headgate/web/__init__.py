"""A web page that shows one running pipeline, live: ``headgate run --ui PORT``.

``story`` keeps what the page shows, ``asking`` passes on requests of browsers, ``app`` answers them, and ``serving``
has the port and the thread. ``page/`` holds everything that browsers load. ``cli.page`` feeds the page from the run.
"""
