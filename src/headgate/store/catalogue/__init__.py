"""The catalogue of a stream store: which events exist, where they are, and every decision, behind verbs.

``base`` says the verbs; the rest of the room carries them out in SQL, and nobody outside knows a table.
"""
