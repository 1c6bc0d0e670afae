"""The parts of the step rewrite: editing a graph, walking it, and asking partitioners about new forms."""
