"""The options, the requests and the results of texts."""
