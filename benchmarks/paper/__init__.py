"""The claims of "Closed-Form Last Layer Optimization" (arXiv 2510.04606), tried one by one.

Scripts here share the code of the folder above, so they are run as modules from there:
`cd benchmarks && python -m paper.theory`. Each writes results/paper_NAME.json with a table (.md)
and a picture (.png) beside it.
"""
