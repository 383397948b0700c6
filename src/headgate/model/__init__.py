"""Plain values of the whole system: identifiers, graphs, plans, manifests, configuration. The standard library only."""
