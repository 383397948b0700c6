"""The client side of a store that another process serves, and the messages between both.

``served_catalogue`` and ``served_storage`` are the catalogue and the chunks of such a store. ``client`` sends requests
and waits for answers, ``hearing`` receives news, and ``verbs`` and ``values`` define the messages. Counterpart:
``store.serving``. Source: docs/spec/served-store.md.
"""
