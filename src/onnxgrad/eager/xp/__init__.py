"""The functions of the array namespace, in modules by the categories of the array API standard."""
