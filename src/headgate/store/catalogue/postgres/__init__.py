"""A catalogue on a PostgreSQL server, so that processes of many machines share a store.

The verbs are those of ``catalogue.sql``. Here is what differs from SQLite's file: how it is reached, how transactions
begin, what its failures mean, and how readers hear of changes. Source: docs/spec/shared-store.md.
"""
