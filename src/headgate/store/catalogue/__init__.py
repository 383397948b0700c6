"""The catalogue of a stream store: it records which events exist and where, and makes every decision.

``base`` declares the verbs. The other modules execute them in SQL; no code outside this package knows a table.
"""
