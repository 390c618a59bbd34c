"""What is computed: the graph (`ir`), how a trace becomes one (`from_jaxpr`), what is legal (`check`)."""
