"""What is opened and served: models, applications, profiles, executors."""
