"""Pages in one file each: how they are put together, their words in two languages, the model that runs in them."""
