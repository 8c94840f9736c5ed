"""A Kubernetes cluster as the router sees it: pods, pools and the Inference Extension's resources."""
