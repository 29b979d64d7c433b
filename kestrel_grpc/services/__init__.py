"""The gRPC services, one servicer a module. messages/ converts what they read and write; answers/ runs the skills."""
