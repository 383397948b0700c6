"""The stream store for programs of asyncio: the same calls, carried out beside the event loop."""
