"""Glue to other people's training loops: the rules inside torch's DistributedDataParallel."""
