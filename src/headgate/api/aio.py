"""The stream store for asyncio programs: the same calls, made in threads beside the event loop."""
