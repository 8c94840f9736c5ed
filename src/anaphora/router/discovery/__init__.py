"""Where replicas are found: lists, files, names in DNS, and a Kubernetes cluster (`anaphora.router.kubernetes`)."""
