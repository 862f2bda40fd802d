"""The router: a stock Envoy, its routes written by Perennial, its calls captured for the log."""
