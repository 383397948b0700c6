"""The stream store: layouts, schemas, truncation, scaling, transactions, reader groups."""
