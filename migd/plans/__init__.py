"""What is wished, as values: plans, rules matched to GPUs, previews, and import of mig-parted files. Pure."""
