"""What heads and features are: functions of any network and images."""
