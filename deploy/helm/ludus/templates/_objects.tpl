{{/* Claim for runs, files and network policies of a component. Context: root, name, role (the main one), port (open to all; 0: none), runs. */}}
{{- define "ludus.commonObjects" -}}
{{- if and .runs .root.Values.storage.size }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name }}-runs
  labels:
    {{- omit (include "ludus.labels" . | fromYaml) "ludus.dev/job" | toYaml | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
    argocd.argoproj.io/sync-options: Delete=false,Prune=false
    kustomize.toolkit.fluxcd.io/prune: disabled
spec:
  accessModes: [{{ .root.Values.storage.accessMode }}]
  resources:
    requests:
      storage: {{ .root.Values.storage.size }}
  {{- with .root.Values.storage.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
{{- end }}
{{- with .root.Values.files }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ $.name }}-files
  labels:
    {{- include "ludus.labels" $ | nindent 4 }}
data:
  {{- range $path, $content := . }}
  {{ include "ludus.fileKey" $path }}: {{ $content | toJson }}
  {{- end }}
{{- end }}
{{- if .root.Values.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}
  labels:
    {{- include "ludus.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      ludus.dev/job: {{ .name }}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              ludus.dev/job: {{ .name }}
{{- if .port }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}-{{ .role }}-open
  labels:
    {{- include "ludus.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "ludus.selector" . | nindent 6 }}
  policyTypes: [Ingress]
  ingress:
    - ports:
        - protocol: TCP
          port: {{ .port }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Name of the Secret of a component. Context: root, component. */}}
{{- define "ludus.secretName" -}}
{{- (index .root.Values .component).existingSecret | default (include "ludus.name" .) -}}
{{- end -}}

{{/*
Secret with random values, which upgrades keep. Not rendered with `existingSecret`. Context: root, component, name, role, keys (list).
`helm template` has no cluster to read from and writes new values each time: use `existingSecret` there.
*/}}
{{- define "ludus.secret" -}}
{{- if not (index .root.Values .component).existingSecret }}
{{- if or .root.Values.secretVariables .root.Values.storage.credentials }}
{{- fail (printf "secretVariables and storage.credentials need %s.existingSecret: kubectl create secret generic %s --from-file=KEY=FILE …" .component .name) }}
{{- end }}
{{- $old := (lookup "v1" "Secret" .root.Release.Namespace .name).data | default dict }}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name }}
  labels:
    {{- include "ludus.labels" . | nindent 4 }}
type: Opaque
data:
  {{- range .keys }}
  {{ . }}: {{ index $old . | default (randAlphaNum 48 | b64enc) }}
  {{- end }}
  {{- if .redis }}
  {{- $password := index $old "LUDUS_MEMORY_PASSWORD" | default (randAlphaNum 48 | b64enc) }}
  LUDUS_MEMORY_PASSWORD: {{ $password }}
  redis.conf: {{ include "ludus.redisConfiguration" (dict "password" (b64dec $password) "memory" .redis.memory) | b64enc }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Autoscaler by CPU load. Context: root, name, role, target, scale (min, max, cpuPercent). */}}
{{- define "ludus.cpuAutoscaler" -}}
---
apiVersion: autoscaling/v1
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}-{{ .role }}
  labels:
    {{- include "ludus.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ .target }}
  minReplicas: {{ .scale.min }}
  maxReplicas: {{ .scale.max }}
  targetCPUUtilizationPercentage: {{ .scale.cpuPercent }}
{{- end -}}
