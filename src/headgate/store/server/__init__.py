"""A process that offers its store to others: ``headgate store serve``.

``server`` listens and ends, ``connections`` has one thread per connection and carries the bytes of events, ``handlers``
executes verbs, knows the outcome of each request, and announces changes. Counterpart: ``store.client``. Source:
docs/spec/served-store.md.
"""
