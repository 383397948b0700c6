"""A catalogue on a PostgreSQL server, so that processes of many machines share a store.

The verbs are those of ``catalogue.sql``. This package has what differs from SQLite: how to connect, how transactions
begin, what failures mean, and how readers learn of changes. Source: docs/spec/shared-store.md.
"""
