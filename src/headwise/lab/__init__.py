"""Studies: known systems and claims, run again with the parts of this house."""
