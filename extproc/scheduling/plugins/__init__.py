"""The plugins of the field, each a frozen struct of parameters with one method. Formulas and defaults name their source."""
