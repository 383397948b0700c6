"""A web page that shows one running pipeline, live: ``headgate run --ui PORT``.

``story`` keeps what there is to show; ``asking`` passes on what browsers ask for; ``app`` answers them; ``serving`` has
the port and the thread; ``page/`` is what browsers load, all of it from here. ``cli.page`` hears it from the run.
"""
