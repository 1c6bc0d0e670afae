"""How claimed nodes become partitions."""
