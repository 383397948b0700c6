"""Avro and Protobuf, with the schemas of a registry."""
