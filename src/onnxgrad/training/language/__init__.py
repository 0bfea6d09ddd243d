"""Language models: tasks that turn documents and conversations into tokens, labels and masks."""
