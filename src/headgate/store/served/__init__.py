"""A store that another process serves, seen from its clients, and what both say to each other.

``served_catalogue`` and ``served_storage`` are catalogue and chunks of such a store, ``client`` asks and waits,
``hearing`` hears of news, ``verbs`` and ``values`` are the words. Counterpart: ``store.serving``. Source:
docs/spec/served-store.md.
"""
