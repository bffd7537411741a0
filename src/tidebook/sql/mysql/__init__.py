"""MariaDB and MySQL, with pymysql."""
