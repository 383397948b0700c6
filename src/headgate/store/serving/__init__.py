"""A process that offers its store to others: ``headgate store serve``.

``server`` listens and ends, ``connections`` has one thread for each connection, ``carrying`` carries out verbs,
``chunks`` takes and gives the bytes of events, ``settling`` knows what became of a question, ``news`` tells of changes.
Counterpart: ``store.served``. Source: docs/spec/served-store.md.
"""
