"""Plain values of the whole system: ids, graphs, plans, manifests, configuration. Uses only the standard library."""
