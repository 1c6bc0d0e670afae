"""The parts of the step rewrite: editing a graph, and asking partitioners about new forms."""
