"""A web page that shows one running pipeline, live: ``headgate run --ui PORT``.

``view_model`` keeps what the page shows, ``actions`` passes on requests of browsers, ``app`` answers them, and
``server`` has the port and the thread. ``page/`` holds everything that browsers load. ``cli.progress`` feeds the page.
"""
