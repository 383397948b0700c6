"""The catalogue of a stream store: knows which events exist and where, and makes every decision, behind verbs.

``base`` declares the verbs. The other modules execute them in SQL; no code outside this package knows a table.
"""
