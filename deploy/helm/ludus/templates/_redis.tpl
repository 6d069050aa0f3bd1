{{/* Redis of a fleet: Service, address, StatefulSet, claim. Context: root, component, name, grace. */}}
{{- define "ludus.redis" -}}
{{- $redis := .root.Values.fleet.redis }}
{{- $context := merge (dict "role" "memory") (omit . "runs") }}
{{- $name := printf "%s-memory" .name }}
{{- $data := ternary (dict "persistentVolumeClaim" (dict "claimName" $name)) (dict "emptyDir" dict) (not (empty $redis.storage)) }}
{{- $socket := dict "port" 6379 }}
{{- $pod := merge (dict
      "restartPolicy" "Always"
      "index" "0"
      "foreign" true
      "image" $redis.image
      "resources" (dict "cpus" 1 "memory" $redis.memory "sharedMemory" "64Mi")
      "checksums" (dict "checksum/redis" (toJson $redis | sha256sum))
      "secret" (include "ludus.secretName" .)
      "secretItems" (list (dict "key" "redis.conf" "path" "redis.conf"))
      "command" (list "redis-server" "/etc/ludus/secrets/redis.conf")
      "ports" (dict "redis" 6379)
      "probes" (dict
        "readinessProbe" (dict "tcpSocket" $socket "periodSeconds" 5)
        "livenessProbe" (dict "tcpSocket" $socket "periodSeconds" 20 "failureThreshold" 6))
      "volumes" (list (merge (dict "name" "data") $data))
      "mounts" (list (dict "name" "data" "mountPath" "/data"))) $context }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "ludus.labels" $context | nindent 4 }}
spec:
  selector:
    {{- include "ludus.selector" $context | nindent 4 }}
  ports:
    - name: redis
      port: 6379
      targetPort: 6379
      protocol: TCP
  publishNotReadyAddresses: true
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ .name }}-addresses
  labels:
    {{- include "ludus.labels" . | nindent 4 }}
data:
  memory: {{ $name }}
{{- with $redis.storage }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ $name }}
  labels:
    {{- include "ludus.labels" $context | nindent 4 }}
spec:
  accessModes: [ReadWriteOnce]
  resources:
    requests:
      storage: {{ . }}
{{- end }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "ludus.labels" $context | nindent 4 }}
spec:
  replicas: 1
  serviceName: {{ $name }}
  selector:
    matchLabels:
      {{- include "ludus.selector" $context | nindent 6 }}
  template:
    {{- include "ludus.podTemplate" $pod | nindent 4 }}
{{- end -}}

{{/* redis.conf. Nothing is evicted: a full server rejects writes. Data may fill three quarters of the memory. Context: password, memory (Mi or Gi). */}}
{{- define "ludus.redisConfiguration" -}}
{{- $unit := ternary 1073741824 1048576 (hasSuffix "Gi" .memory) -}}
{{- $bytes := mul (regexFind "^[0-9]+" .memory | int64) $unit -}}
bind * -::*
port 6379
protected-mode yes
requirepass {{ .password | quote }}
dir /data
appendonly yes
appendfsync everysec
save ""
daemonize no
logfile ""
maxmemory {{ div (mul $bytes 3) 4 }}
maxmemory-policy noeviction
{{ end -}}
