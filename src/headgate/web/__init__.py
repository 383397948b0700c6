"""A web page that shows one running pipeline, live: ``headgate run --ui PORT``.

``story`` keeps what there is to show and decides nothing else; ``watching`` hears it from the run; ``app`` answers
browsers; ``serving`` has the port and the thread; ``page/`` is what browsers load, all of it from here.
"""
