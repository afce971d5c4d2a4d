"""A swarm of office PCs that together run one large language model."""
