"""Tables of databases as sinks, through SQLAlchemy."""
