"""A process that offers its store to others: ``headgate store serve``.

``server`` listens and ends, ``connections`` has one thread per connection, ``carrying`` executes verbs, ``chunks``
receives and sends the bytes of events, ``settling`` knows the outcome of each request, and ``news`` announces changes.
Counterpart: ``store.served``. Source: docs/spec/served-store.md.
"""
