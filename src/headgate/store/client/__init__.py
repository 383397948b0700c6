"""The client side of a store that another process serves, and the messages between both.

``remote_store`` has the catalogue, the chunks and the change listener of such a store. ``connection`` sends requests
and waits for answers, and ``messages`` defines them. Counterpart: ``store.server``. Source:
docs/spec/served-store.md.
"""
