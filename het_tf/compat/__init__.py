"""Uses of TensorFlow and Keras symbols that are not public, where no public way exists.

No other package of `het_tf` uses such symbols. Each function names the symbol, the reason, the
versions that were checked, and what fails without the symbol.
"""
