"""A web page that shows one running pipeline, live: ``headgate run --ui PORT``.

``view_model`` keeps what the page shows, ``responses`` checks access and passes on requests, ``app`` answers them and
has the port and the thread. ``page/`` holds everything that browsers load. ``cli.output`` feeds the page.
"""
