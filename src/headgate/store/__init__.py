"""The embedded stream store: streams of events on a storage, with a catalogue in a database."""
